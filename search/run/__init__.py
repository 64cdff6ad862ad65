"""One search and many: what a search may need, its growth, its limits, and who runs beside whom."""
