"""Tests of aflock."""
