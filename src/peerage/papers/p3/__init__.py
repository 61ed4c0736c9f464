"""P3 (FACADE, clusters with their own features, and fairness): every table and figure."""
