"""Reports: pages, tables and figures of what was computed."""
