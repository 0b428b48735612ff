"""What a run is: a closed schema, read from YAML or literal Python, with dotted overrides."""
