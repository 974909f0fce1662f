"""Tests of net/server/http."""
