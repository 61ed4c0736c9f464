"""P1 (DFML, mutual learning without a server): every table and figure."""
