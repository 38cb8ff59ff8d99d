"""A whole build: plan, compile, measure, choose, publish. Uses tune."""
