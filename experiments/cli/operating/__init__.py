"""Commands for those who operate a server: is it well, who may call, would it start."""
