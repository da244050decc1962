import audit.records
from django.db import migrations, models


class Migration(migrations.Migration):

    dependencies = [
        ('backends', '0008_history_of_models'),
    ]

    operations = [
        migrations.AddField(
            model_name='historicalalias',
            name='history_actor',
            field=models.CharField(default='', editable=False, max_length=150),
        ),
        migrations.AddField(
            model_name='historicalalias',
            name='history_address',
            field=models.CharField(default='', editable=False, max_length=45),
        ),
        migrations.AddField(
            model_name='historicalalias',
            name='history_via',
            field=models.CharField(default='', editable=False, max_length=200),
        ),
        migrations.AddField(
            model_name='historicalbackend',
            name='history_actor',
            field=models.CharField(default='', editable=False, max_length=150),
        ),
        migrations.AddField(
            model_name='historicalbackend',
            name='history_address',
            field=models.CharField(default='', editable=False, max_length=45),
        ),
        migrations.AddField(
            model_name='historicalbackend',
            name='history_via',
            field=models.CharField(default='', editable=False, max_length=200),
        ),
        migrations.AddField(
            model_name='historicalbackendmodel',
            name='history_actor',
            field=models.CharField(default='', editable=False, max_length=150),
        ),
        migrations.AddField(
            model_name='historicalbackendmodel',
            name='history_address',
            field=models.CharField(default='', editable=False, max_length=45),
        ),
        migrations.AddField(
            model_name='historicalbackendmodel',
            name='history_via',
            field=models.CharField(default='', editable=False, max_length=200),
        ),
        migrations.AddField(
            model_name='historicalmodelstrategy',
            name='history_actor',
            field=models.CharField(default='', editable=False, max_length=150),
        ),
        migrations.AddField(
            model_name='historicalmodelstrategy',
            name='history_address',
            field=models.CharField(default='', editable=False, max_length=45),
        ),
        migrations.AddField(
            model_name='historicalmodelstrategy',
            name='history_via',
            field=models.CharField(default='', editable=False, max_length=200),
        ),
        migrations.AddField(
            model_name='historicalnode',
            name='history_actor',
            field=models.CharField(default='', editable=False, max_length=150),
        ),
        migrations.AddField(
            model_name='historicalnode',
            name='history_address',
            field=models.CharField(default='', editable=False, max_length=45),
        ),
        migrations.AddField(
            model_name='historicalnode',
            name='history_via',
            field=models.CharField(default='', editable=False, max_length=200),
        ),
        # rows that are there say nothing of it
        migrations.AlterField(
            model_name='historicalalias',
            name='history_actor',
            field=models.CharField(default=audit.records.current_actor, editable=False, max_length=150),
        ),
        migrations.AlterField(
            model_name='historicalalias',
            name='history_address',
            field=models.CharField(default=audit.records.current_address, editable=False, max_length=45),
        ),
        migrations.AlterField(
            model_name='historicalalias',
            name='history_via',
            field=models.CharField(default=audit.records.current_via, editable=False, max_length=200),
        ),
        migrations.AlterField(
            model_name='historicalbackend',
            name='history_actor',
            field=models.CharField(default=audit.records.current_actor, editable=False, max_length=150),
        ),
        migrations.AlterField(
            model_name='historicalbackend',
            name='history_address',
            field=models.CharField(default=audit.records.current_address, editable=False, max_length=45),
        ),
        migrations.AlterField(
            model_name='historicalbackend',
            name='history_via',
            field=models.CharField(default=audit.records.current_via, editable=False, max_length=200),
        ),
        migrations.AlterField(
            model_name='historicalbackendmodel',
            name='history_actor',
            field=models.CharField(default=audit.records.current_actor, editable=False, max_length=150),
        ),
        migrations.AlterField(
            model_name='historicalbackendmodel',
            name='history_address',
            field=models.CharField(default=audit.records.current_address, editable=False, max_length=45),
        ),
        migrations.AlterField(
            model_name='historicalbackendmodel',
            name='history_via',
            field=models.CharField(default=audit.records.current_via, editable=False, max_length=200),
        ),
        migrations.AlterField(
            model_name='historicalmodelstrategy',
            name='history_actor',
            field=models.CharField(default=audit.records.current_actor, editable=False, max_length=150),
        ),
        migrations.AlterField(
            model_name='historicalmodelstrategy',
            name='history_address',
            field=models.CharField(default=audit.records.current_address, editable=False, max_length=45),
        ),
        migrations.AlterField(
            model_name='historicalmodelstrategy',
            name='history_via',
            field=models.CharField(default=audit.records.current_via, editable=False, max_length=200),
        ),
        migrations.AlterField(
            model_name='historicalnode',
            name='history_actor',
            field=models.CharField(default=audit.records.current_actor, editable=False, max_length=150),
        ),
        migrations.AlterField(
            model_name='historicalnode',
            name='history_address',
            field=models.CharField(default=audit.records.current_address, editable=False, max_length=45),
        ),
        migrations.AlterField(
            model_name='historicalnode',
            name='history_via',
            field=models.CharField(default=audit.records.current_via, editable=False, max_length=200),
        ),
    ]
