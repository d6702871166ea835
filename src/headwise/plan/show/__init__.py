"""Tables, CSV and charts of a plan."""
