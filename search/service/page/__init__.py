"""The page that shows a search tree grow, from a running search or from traces; see the README beside it."""
