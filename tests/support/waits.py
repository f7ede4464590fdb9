"""How long tests wait for what surely comes."""

#: Ten minutes, since what takes a second may take minutes where a machine is slow and busy; a test fails sooner by
#: what it asserts than by this.
LONG = 600.0
