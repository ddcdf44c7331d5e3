"""The board for agents: tools of the Model Context Protocol over the functions of its pages."""
