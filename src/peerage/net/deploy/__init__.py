"""Networks of peers: start them, collect their records, export their folders."""
