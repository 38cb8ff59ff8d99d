"""w as the left operand of wgmma, made bf16 of codes in registers."""
