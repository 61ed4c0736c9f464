"""Tables, figures and pages made from run folders only, never from live objects."""
