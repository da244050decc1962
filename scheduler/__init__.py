from scheduler import compiled

compiled.use()
