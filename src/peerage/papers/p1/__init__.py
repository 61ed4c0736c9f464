"""P1 (DFML, mutual learning of different architectures without server): every table and figure."""
