"""Ready-made jobs, one YAML file each; they ship with the package and are read through `importlib.resources`."""
