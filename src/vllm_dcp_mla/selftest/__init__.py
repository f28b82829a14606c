"""DCP on any machine: several processes run the package's own path and are compared with float64."""
