"""Tests of net/server."""
