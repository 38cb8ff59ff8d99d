"""What a build makes: problems, buckets and variant families of the models. Uses models."""
