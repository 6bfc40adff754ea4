"""The same MOON as a map over shards of rows and a sum of K x d statistics: where N x K arrays no longer fit."""
