"""Why there is no figure."""

from __future__ import annotations


class NotMeasuredError(Exception):
    """A server that was not installed, not started, wrong or silent; the text is for people."""
