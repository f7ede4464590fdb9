"""Machines of others: launchers, prices, spot. It writes what starts `headway train` there."""
