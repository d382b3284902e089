"""The soak: ``make soak`` trains two runs, kills what can be killed, and compares one real server with both (`run`)."""
