from .forward import rows
