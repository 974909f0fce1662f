"""Tests of local."""
