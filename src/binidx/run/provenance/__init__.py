"""Documents that a run has read, and the steps: accounts, exposures, exports, data cards, spikes of the loss."""
