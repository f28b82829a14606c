"""DCP on any machine: processes that run the package's own path, compared with float64."""
