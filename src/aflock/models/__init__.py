"""Flat-vector models."""
