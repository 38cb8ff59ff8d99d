# ruff: noqa
from .specialized_weight import weight_specialized
from .ppacross import rows_specialized
