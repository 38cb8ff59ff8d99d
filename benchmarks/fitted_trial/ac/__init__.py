# ruff: noqa
from .specialized_weight import weight_specialized
from .across import rows_specialized
