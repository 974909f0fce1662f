"""Tests of net/storage."""
