"""Tests of net/identity."""
