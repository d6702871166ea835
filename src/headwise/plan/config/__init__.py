"""Read a model's config into the sizes that its cost depends on."""
