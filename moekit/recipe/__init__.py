"""Recipes: YAML files to typed values, and everything that can be said against them at the desk."""
