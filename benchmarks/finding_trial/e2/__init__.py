from .decode import rows_specialized
