"""Tests of net/federation."""
