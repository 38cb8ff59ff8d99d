# ruff: noqa
from .specialized_weight import weight_specialized
from .specialized import rows_specialized
