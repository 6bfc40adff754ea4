"""Streams behind HTTP: `moontide serve`."""
