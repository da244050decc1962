"""Who changed what, from where: what every row of a history says besides, and that it stays."""
