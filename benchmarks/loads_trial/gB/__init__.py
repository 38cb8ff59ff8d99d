from .specialized import rows_specialized
from .specialized_weight import weight_specialized
from .forward import rows
from .grad_weight import weight
