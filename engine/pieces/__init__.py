"""Named pieces of requests' state: their kinds, names and slots."""
