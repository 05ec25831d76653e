"""trackio.    pip install trackio; trackio show"""
import trackio


class Trackio:
    def __init__(self, folder, *, settings):
        name = f"{folder.name} {settings['began']}"  # a name that is used again is another run
        trackio.init("samestep", name=name, config=settings, resume="allow", embed=False)
        self.close = trackio.finish

    def __call__(self, step, metrics):
        trackio.log(metrics, step=step)
