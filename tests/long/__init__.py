"""Tests that take minutes each: `make test-long`."""
