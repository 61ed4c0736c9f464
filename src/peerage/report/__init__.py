"""Tables, figures and HTML pages, made from run folders only."""
