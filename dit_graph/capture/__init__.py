"""One execution of a forward, watched and cut into segments and breaks."""
