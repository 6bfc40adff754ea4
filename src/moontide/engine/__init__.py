"""Mixtures over shards of rows, as a map and a sum of K x d statistics: for tasks whose N x K arrays do not fit."""
