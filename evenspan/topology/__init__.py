"""Who holds what: degrees of the mesh axes, frame ranges per rank, process groups."""
