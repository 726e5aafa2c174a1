"""A recipe's own run, made small, at the desk."""
