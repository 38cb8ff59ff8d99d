"""The problems, buckets and variant families of the models that a build is for. Uses models."""
