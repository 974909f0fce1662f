"""Tests of net/commands."""
