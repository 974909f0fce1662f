"""Tests of net/client."""
