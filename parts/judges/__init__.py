"""`async def` rewards, which wait: many calls of one worker run together."""
