"""hisparse inside serving frameworks: one module per framework."""
